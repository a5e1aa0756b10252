"""``horovod.runner.common.service.compute_service``: the rendezvous of a compute job and a training job."""

from horovod.runner.compute_service import Addresses, ComputeClient, ComputeService

__all__ = ["Addresses", "ComputeClient", "ComputeService"]
