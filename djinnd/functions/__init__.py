"""The intervention process: functions of one tenant, called beside the engine and confined by the kernel.

The server spawns it (server/function_process.py) and never imports it; what the two say is in djinnd/interventions.py.
"""
