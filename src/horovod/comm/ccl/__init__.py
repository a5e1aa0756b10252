"""The engine over Intel's oneCCL, through its C interface."""
