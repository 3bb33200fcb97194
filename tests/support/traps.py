"""Files that run code when they are unpickled, in every form that a file of numbers can have."""

import io
import pathlib
import pickle
import zipfile

import numpy as np
import torch
import yaml


class Trap:
    """Unpickled, it makes the file `marker`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def guises(marker):
    """The same trap by each way of writing it."""
    trap = Trap(marker)
    array = np.empty(1, dtype=object)
    array[0] = trap
    return {
        "pickle": pickle.dumps({"model": trap}),
        "torch": _written(lambda file: torch.save({"model": trap}, file)),
        "torch before 1.6": _written(lambda file: torch.save(trap, file, _use_new_zipfile_serialization=False)),
        "npy": _written(lambda file: np.save(file, array, allow_pickle=True)),
        "npz": _written(lambda file: np.savez(file, images=array, labels=array)),
        "zip": _written(lambda file: _zip(file, pickle.dumps(trap))),
        "yaml": f'!!python/object/apply:os.mkdir ["{marker}"]'.encode(),
    }


def _written(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _zip(file, data):
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("archive/data.pkl", "data.pkl", "images.npy"):
            archive.writestr(name, data)


def spring(name, data):
    """Read the data as a careless reader does."""
    if name.startswith("torch"):
        torch.load(io.BytesIO(data), weights_only=False)
    elif name in ("npy", "npz"):
        array = np.load(io.BytesIO(data), allow_pickle=True)
        _ = array["images"] if name == "npz" else array
    elif name == "zip":
        pickle.loads(zipfile.ZipFile(io.BytesIO(data)).read("data.pkl"))
    elif name == "yaml":
        yaml.unsafe_load(data)
    else:
        pickle.loads(data)
