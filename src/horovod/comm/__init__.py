"""The data plane: one engine a folder, each behind the one contract of ``comm.base.Communicator``."""
