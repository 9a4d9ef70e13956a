"""Confinement of child processes by the kernel: Landlock for files, seccomp for system calls, limits for memory.

Intervention processes and text workers confine themselves before they run code or data of a client.
"""
