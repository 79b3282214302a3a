"""The specification: every op in plain torch. Faster implementations are tested against these and never import them."""
