"""``DistributedOptimizer`` and ``DistributedTrainer`` for MXNet, and the reduction of gradients that they share."""
