"""Weight sync, which sends the policy's new weights to servers by reload, shared memory, NCCL or LoRA.

The package imports `agents.engines.transport`, `envs` and `tapes`.
"""
