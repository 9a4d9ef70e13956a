"""Models larger than the memory they are given: djinnd beside what else there is, on one machine in one run.

    python -m tools.bench.stream tools/bench/configs/llama-2-13b-24gib.yaml --checkpoint /dev/shm/llama-2-13b

The bus is measured first. Then each contender has the machine for itself, with the same budget of device memory and,
where it can be told, the same blocks resident:

| contender | what |
|---|---|
| `gpu-only` | transformers, all weights on the device; out of memory is a result |
| `accelerate` | transformers, `device_map` |
| `diffusers` | group offload, block by block with streams |
| `deepspeed`, `deepspeed-persistent` | ZeRO-Inference as documented, and with as much resident as the others |
| `resident` | djinnd with all the memory there is: the yardstick; streaming must repeat its logits bit for bit |
| `synchronous` | djinnd with prefetch and packing off: a block is fetched when its turn is |
| `plain` | djinnd with packing off |
| `packed` | djinnd |

| module | what |
|---|---|
| `experiment` | what is asked for: a YAML file, checked |
| `outcome` | what is found: a contender's, and what travels between the processes |
| `peers`, `served` | measure a peer in a process of its own; measure a daemon |
| `memory` | NVML: what this process's descendants have of the device |
| `run` | one contender after another |
| `table` | what is found, for people |
"""
