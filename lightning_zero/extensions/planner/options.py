"""What ``lightning-zero plan`` says of itself and of its options, without torch."""

from __future__ import annotations

__all__ = ["OPTIONS", "WHAT"]

WHAT = """\
Shows how a model would be split over processes, what every stage would take of each, and which one to choose.

The model is the configuration's (or --model), that of a Hugging Face configuration (--hf-config), or a number of
parameters (--parameters). It is built on the meta device: nothing is trained or allocated. Understands every option
of ``fit``, so that the configuration of a run can be given as it is; data are only for ``--activations measured``. The
stage, the number of processes and the other settings of the plan come from ``trainer`` unless they are given.
"""
OPTIONS = {
    "hf_config": "A config.json, or a folder with one.",
    "parameters": "A number of parameters instead of a model: 7.5B.",
    "device_memory": "Memory of one device, for example 80G or 24GiB: recommends a stage that fits.",
    "host_memory": "Memory of a machine, for all its processes: 512GB. As much as it takes if not given.",
    "activations": "What has to stay free on the device; or measured: with the data's first batch, and no memory.",
    "lora": "Rank of LoRA adapters, which alone are trained, where peft puts them: 16. Needs peft.",
    "lora_targets": "What gets an adapter, if not what peft chooses for the model: q_proj,v_proj, or all-linear.",
    "batch_size": "Of one process, to measure activations of --hf-config with.",
    "sequence_length": "Tokens of each example there.",
    "link_between": "Speed of a machine's link to the others, each way: 10Gbit/s or 10Gbps. Shows seconds.",
    "link_within": "Speed of a process's link within its machine, each way: 100GB/s.",
    "plot": "Write a picture, FILE.png or FILE.svg: a bar of each stage. Needs matplotlib.",
    "json": "Print everything as one JSON object.",
    "stage": "ZeRO stage: 1, 2 or 3. From trainer.strategy if not given.",
    "world_size": "Number of processes. trainer.devices * trainer.num_nodes if not given.",
    "units": "Class names that become units.",
    "bucket_mib": "Size of a gradient bucket in MiB (stages 1 and 2).",
    "prefetch": "Units gathered ahead of the one that computes (stage 3).",
    "offload": "Where optimizer state rests, in stage 3 parameters too: host, nvme, none. As trainer.strategy has it.",
}
