"""All uses of transformers, peft and accelerate beyond their documented interfaces.

Tested with transformers 5.22.2, peft 0.21.2, accelerate 1.15.0 and torch 2.13.0, and apart from placement
with the lower bounds of pyproject.toml: transformers 5.6.0 and peft 0.21.0. Each function names what it
relies on, so only these modules need review after an upgrade.
"""
