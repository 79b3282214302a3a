"""Compaction of a corpus into a cartridge: a small cache of keys, values and biases that no token had."""
