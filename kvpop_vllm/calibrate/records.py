"""Measurements of a calibration, kept line by line, so that an interrupted call goes on."""

import json
from pathlib import Path

from kvpop_vllm.calibration import shares, statistics
from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import json_lines, naming, write_whole

NAME = "measured.jsonl"
RESULTS = (shares.NAME, "report.json", statistics.CONFIG_NAME, statistics.TENSORS_NAME)
"""Files of a folder that are made from the measurements."""


def differing(folder: Path, settings: dict) -> list[str]:
    """Return the names of the settings that a folder's measurements were made with other values of; all without any."""
    first = next(iter(json_lines(folder / NAME)), {}).get("settings")
    measured = first if isinstance(first, dict) else {}
    return [name for name in settings if name not in measured or measured[name] != settings[name]]


class Records:
    """File of measurements.

    Args:
        folder: folder of the file; it is made.
        settings: what the measurements depend on, by name.

    Raises:
        ConfigError: the folder holds measurements with other settings, or the file is damaged.
    """

    def __init__(self, folder: Path, settings: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._values = folder / NAME, {}
        lines = json_lines(self.path)
        # written again without a last line that was cut off
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        if not lines:
            for name in RESULTS:  # of an earlier calibration
                (folder / name).unlink(missing_ok=True)
            self._append({"settings": settings})
            return
        if changed := differing(folder, settings):
            raise ConfigError(
                f"{folder} holds measurements with other settings ({', '.join(changed)}): choose another --out, or remove {self.path}"
            )
        try:
            # lists cannot be keys of a dict
            self._values = {json.dumps(line["key"]): line["value"] for line in lines[1:]}
        except KeyError:
            raise ConfigError(f"{self.path} is damaged: remove it") from None

    def _append(self, line: dict) -> None:
        with naming(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def __contains__(self, key: list) -> bool:
        """Return whether there is a measurement with this key."""
        return json.dumps(key) in self._values

    def __getitem__(self, key: list):
        """Return the measurement with a key."""
        return self._values[json.dumps(key)]

    def put(self, key: list, value: object) -> None:
        """Add a measurement, which can be written as JSON."""
        self._append({"key": key, "value": value})
        self._values[json.dumps(key)] = value
