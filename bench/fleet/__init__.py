"""A suite over the GPUs of a Ray cluster: one worker a GPU, one shard (an op's part of the plan) at a time."""
