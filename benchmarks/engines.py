"""Stock vLLM against fixed budgets, or with a peer or a cartridge in turns with it: engines and servers take turns.

    python benchmarks/engines.py --measure prefill --rounds 3
    python benchmarks/engines.py --measure chat --help

Each measure has options of its own. Without one, decoding is measured. Nothing is called faster unless all gave stock's
greedy tokens on short prompts. Rows are appended to a file of the measure's name in benchmarks/results.
"""

import argparse
import sys

import batches
import chat
import decode
import plain
import servers
from harness import MEASURES

MAINS = {
    "decode": decode.main,
    "prefill": batches.prefill,
    "capacity": batches.capacity,
    "load": servers.load,
    "chat": chat.main,
    "plain": plain.main,
    "cartridge": servers.cartridge,
}


def main(arguments: list[str], measure: str = "decode") -> int:
    """Measure what ``--measure`` names and return the exit code.

    Args:
        arguments: command line.
        measure: what is measured without the option.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False, allow_abbrev=False)
    parser.add_argument("--measure", choices=MEASURES, default=measure)
    options, _ = parser.parse_known_args(arguments)
    return MAINS[options.measure](arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
