"""Confinement of child processes by the kernel: Landlock for files, seccomp for system calls, limits for memory.

Children that run what a client wrote close this sandbox behind themselves: intervention processes and text workers.
"""
