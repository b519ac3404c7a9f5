"""Triton kernels of the fused decoder layers. Only a CUDA device or Triton's interpreter runs them,
so nothing that serves on a CPU imports this package.
"""
