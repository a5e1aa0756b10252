"""The data plane: one engine a file, each behind the one contract of ``comm.base.Communicator``."""
