"""Settings that must stand before a backend is first used, and a fresh start for every test."""

import gc
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import pytest

BACKEND = keras.config.backend()


def pytest_collection_finish() -> None:
    # `clear_session` collects garbage after every test; what is imported by now need not be looked
    # through each time (0.3 s).
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"keras {keras.__version__} on {BACKEND}"


@pytest.fixture(autouse=True)
def _fresh_session():
    keras.utils.set_random_seed(0)
    yield
    keras.utils.clear_session()


@pytest.fixture
def float64():
    """Everything in float64, on JAX as well."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        if BACKEND == "jax":
            import jax

            with jax.enable_x64(True):
                yield
        else:
            yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
