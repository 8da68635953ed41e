"""Weight sync: new weights of the policy on their way to servers, by reload, shared memory, NCCL or LoRA.

Imports `agents.engines.transport` and the floors below.
"""
