"""LoRA adapters: reads PEFT folders, and adds their products to the model's own, for each token those of its session"""
