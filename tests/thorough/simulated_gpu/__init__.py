"""A GPU that is not there: ``torch.cuda`` in a build of torch without CUDA, whose kernels compute on the CPU.

``python -m tests.thorough.simulated_gpu`` starts programs that have one. What it finds is what the first run on a GPU
would stop at: tensors of the host that meet those of the device, waits where none should be, memory beside the plan,
arguments that nobody has passed for a while. It shows neither races nor speed, and knows nothing of nccl but its rules.
"""
