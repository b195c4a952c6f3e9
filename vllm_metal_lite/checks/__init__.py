"""Checks that the kernels are correct and fast on this device.

Optional: without this package the engine works and trusts the kernels.
"""
