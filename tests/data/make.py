"""Makes the files of a release that later ones must read: run it once, with that release.

KERAS_BACKEND=tensorflow python tests/data/make.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
from test_checkpoints import N, go_on, held, stopped  # noqa: E402

import keras_ga  # noqa: E402

name = f"release_{keras_ga.__version__.replace('.', '_')}"
model = stopped(N + 2)
model.save(HERE / f"{name}.keras")
model.save_weights(HERE / f"{name}.weights.h5")
np.savez(HERE / f"{name}_held.npz", *held(model.optimizer))
np.savez(HERE / f"{name}_after.npz", *go_on(model))
