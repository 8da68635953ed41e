"""Weight sync: sends new weights of the policy to servers by reload, shared memory, NCCL or LoRA.

The package imports `agents.engines.transport`, `envs` and `tapes`.
"""
