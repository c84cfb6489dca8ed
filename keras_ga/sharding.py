"""Where accumulators live under `keras.distribution`: with their variables, or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def layout_of(variable: keras.Variable) -> Any:
    """The layout that the current distribution gives a variable; None without one."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.get_variable_layout(variable)


def in_parts(variables: Sequence[keras.Variable], mesh_axis: str) -> list[Any]:
    """Layouts like the variables', but cut along an axis of the mesh as well.

    Along the first dimension that is whole so far and can be cut evenly; a variable that has none
    keeps its layout.

    Raises:
        ValueError: If there is no distribution, or its mesh has no such axis.
    """
    distribution = keras.distribution.distribution()
    if keras.backend.backend() != "jax" or distribution is None:
        raise ValueError(
            "`shard_accumulators` must be left out without a `keras.distribution` on JAX, because "
            "there is nothing to shard over. Set one before the optimizer is built. Received: "
            f"shard_accumulators={mesh_axis!r}, backend={keras.backend.backend()!r}, "
            f"distribution={distribution!r}"
        )
    mesh = distribution.device_mesh
    if mesh_axis not in mesh.axis_names:
        raise ValueError(
            "`shard_accumulators` must be an axis of the distribution's device mesh, because "
            f"accumulators are cut along it. Use one of {mesh.axis_names}. Received: "
            f"shard_accumulators={mesh_axis!r}"
        )
    parts = mesh.shape[mesh.axis_names.index(mesh_axis)]
    layouts = []
    for variable in variables:
        axes = list(distribution.get_variable_layout(variable).axes)
        axes += [None] * (len(variable.shape) - len(axes))  # a layout may leave the last ones out
        for dimension, size in enumerate(variable.shape):
            if mesh_axis in axes:
                break
            if axes[dimension] is None and size % parts == 0:
                axes[dimension] = mesh_axis
        layouts.append(keras.distribution.TensorLayout(axes, mesh))
    return layouts
