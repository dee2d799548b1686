"""What runs under `torchrun`: objectives, packing, the sharded policy, checkpoints and the job."""
