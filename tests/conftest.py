"""Settings that must stand before a backend is first used, and a fresh start for every test."""

import gc
import os
import shutil
import tempfile

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import pytest

BACKEND = keras.config.backend()

if BACKEND == "jax":
    # The same small operations and steps in test after test: compiled once, a third of the time
    # is saved. By configuration, so that processes which tests start do not have it, and for each
    # worker alone, since entries are not written atomically.
    import jax

    COMPILED = tempfile.mkdtemp(prefix="keras_ga_tests_")
    jax.config.update("jax_compilation_cache_dir", COMPILED)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure() -> None:
    if BACKEND == "jax":
        shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_collection_finish() -> None:
    # What is imported by now need not be looked through whenever garbage is collected (0.3 s).
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"keras {keras.__version__} on {BACKEND}"


@pytest.fixture(autouse=True)
def _fresh_session():
    keras.utils.set_random_seed(0)
    yield
    # Python collects when it is due; after every test it costs a third of the time on torch.
    keras.utils.clear_session(free_memory=False)


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
