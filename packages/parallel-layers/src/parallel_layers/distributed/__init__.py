"""Process groups: the mesh, collectives with and without autograd, and the gradient norm over ranks."""
