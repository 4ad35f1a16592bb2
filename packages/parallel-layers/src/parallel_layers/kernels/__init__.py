"""Triton kernels behind the layers: each is an operator that torch.compile can take whole.

Nothing here needs Triton to be imported: `parallel_layers.kernels.runtime` says whether kernels can run, and every
layer asks it there and takes plain torch otherwise.
"""
