"""Models larger than their device memory: djinnd beside its peers, on one machine in one run.

    python -m tools.bench.stream tools/bench/configs/llama-2-13b-24gib.yaml --checkpoint /dev/shm/llama-2-13b

The bus is measured first. Then each contender has the machine for itself, with the same budget of device memory. The
same blocks are resident if the contender has a setting for them:

| contender | what |
|---|---|
| `gpu-only` | transformers, all weights on the device; out of memory is a result |
| `accelerate` | transformers, `device_map` |
| `diffusers` | group offload, block by block with streams |
| `deepspeed`, `deepspeed-persistent` | ZeRO-Inference as documented, and with as much resident as the others |
| `resident` | djinnd with all memory: the yardstick; streaming must repeat its logits bit for bit |
| `synchronous` | djinnd with prefetch and packing off: a block is fetched when its turn is |
| `plain` | djinnd with packing off |
| `packed` | djinnd |

`python -m tools.bench.stream.beside CHECKPOINT` measures decode with the host's cores beside the bus.

| module | what |
|---|---|
| `experiment` | an experiment's YAML file, checked |
| `outcome` | results, and the messages between the processes |
| `peers`, `served` | measure a peer in a process of its own; measure a daemon |
| `memory` | NVML: device memory of this process's descendants |
| `run` | one contender after another |
| `table` | results as a table |
| `beside`, `host_rates` | decode with the host's cores beside the bus, and their rates |
"""
