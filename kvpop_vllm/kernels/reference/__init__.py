"""Reference implementations, which specify every op in plain torch.

Faster implementations are tested against them and never import them.
"""
