"""The data plane: engines, one folder each, behind the contract of ``comm.base.Communicator``; and the modules they share."""
