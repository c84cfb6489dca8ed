"""Rows for `quickstart.py`, read through TensorFlow Datasets and without its chatter."""

import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# With JAX or torch, TensorFlow only feeds rows: it must not take the whole GPU for that.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drops what is written to the standard streams, by C++ libraries too.

    TensorFlow's first log lines ignore `TF_CPP_MIN_LOG_LEVEL`, and `contextlib.redirect_stderr`
    does not reach them: the file descriptors themselves are turned away.
    """
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(stream.fileno()) for stream in streams]
    with open(os.devnull, "w") as nowhere:
        try:
            for stream in streams:
                stream.flush()
                os.dup2(nowhere.fileno(), stream.fileno())
            yield
        finally:
            for stream, descriptor in zip(streams, kept, strict=True):
                stream.flush()
                os.dup2(descriptor, stream.fileno())
                os.close(descriptor)


with silence():
    import absl.logging
    import tensorflow_datasets as tfds
    from sklearn.datasets import load_digits

# Where TensorFlow Datasets downloads each dataset from; scikit-learn ships the digits.
SOURCES = {
    "digits": None,
    "mnist": "https://storage.googleapis.com",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "cifar10": "https://www.cs.toronto.edu",
}


class DataError(Exception):
    """The rows can't be had; the message says what to do."""


class Rows(NamedTuple):
    """Two `tf.data.Dataset`s of (image, label), not batched, and the number of training rows."""

    train: Any
    validation: Any
    train_rows: int


class Digits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits, 1,797 images of 8x8 pixels, shipped with scikit-learn."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(8, 8, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        images, labels = load_digits(return_X_y=True)
        # scikit-learn's grey levels run from 0 to 16, those of an 8-bit image from 0 to 255.
        images = (images.reshape(-1, 8, 8, 1) * (255 / 16)).astype("uint8")
        return {
            "train": self._generate_examples(images[:1437], labels[:1437]),
            "test": self._generate_examples(images[1437:], labels[1437:]),
        }

    def _generate_examples(self, images: Any, labels: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield key, {"image": image, "label": label}


def load(name: str, data_dir: Path, at_least: int) -> Rows:
    """Reads a dataset, which the first call prepares in `data_dir` as TFRecord files.

    Raises:
        DataError: If it can't be prepared or has fewer than `at_least` training rows.
    """
    with silence():
        absl.logging.set_verbosity(absl.logging.ERROR)
        tfds.disable_progress_bar()
        try:
            if not tfds.builder(name, data_dir=data_dir).is_prepared():
                _check_source(name)
            (train, validation), info = tfds.load(
                name,
                split=["train", "test"],
                data_dir=data_dir,
                as_supervised=True,
                with_info=True,
            )
        except ModuleNotFoundError as error:
            message = f"TensorFlow Datasets needs {error.name}: run `pip install {error.name}`."
            raise DataError(message) from error
        except (OSError, tfds.download.DownloadError) as error:
            advice = "Take another folder with `--data-dir`."
            if SOURCES[name]:
                advice = "Connect to the network, or use `--dataset digits`, which needs none."
            reason = getattr(error, "reason", error)
            message = f"`{name}` could not be prepared in {data_dir}: {reason}. {advice}"
            raise DataError(message) from error
    train_rows = info.splits["train"].num_examples
    if train_rows < at_least:
        raise DataError(f"`{name}` has only {train_rows} training rows for a batch of {at_least}.")
    return Rows(train, validation, train_rows)


def _check_source(name: str) -> None:
    """Raises `OSError` at once without a network: TFDS would try again for three minutes."""
    if SOURCES[name] is None:
        return
    # A refusal by the server shows that there is one.
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(SOURCES[name], timeout=10).close()
