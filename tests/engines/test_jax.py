"""The JAX engine: stateless steps under jit and scan."""

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    INNER,
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    dense_model,
    fitted,
    micro_batches,
    rows,
    values_of,
)

if BACKEND != "jax":
    pytest.skip("needs the JAX backend", allow_module_level=True)

import jax


def jax_step(model, optimizer):
    def loss_of(trainable, non_trainable, x, y):
        out, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return keras.ops.mean(keras.losses.mean_squared_error(y, out)), non_trainable

    def step(state, batch):
        trainable, non_trainable, optimizer_state = state
        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable, *batch
        )
        trainable, optimizer_state = optimizer.stateless_apply(
            optimizer_state, gradients, trainable
        )
        return (trainable, non_trainable, optimizer_state), loss

    optimizer.build(model.trainable_variables)
    state = [
        values_of(variables)
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    return step, tuple(state)


JAX_INNER = {
    **INNER,
    "multi": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.05, momentum=0.9), {".*kernel": keras.optimizers.Adam(0.02)}
        )
    ),
}


@pytest.mark.parametrize("inner", JAX_INNER)
@pytest.mark.parametrize("loop", ["jit", "scan"])
def test_stateless_apply_under_jit_and_scan(loop, inner):
    if inner == "multi" and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    large, _ = fitted(JAX_INNER[inner](), LARGE_BATCH, epochs=1)
    model = dense_model()
    step, state = jax_step(model, accumulating(JAX_INNER[inner]()))
    x, y = rows()
    if loop == "scan":
        stacked = (x.reshape(3 * N, MICRO_BATCH, -1), y.reshape(3 * N, MICRO_BATCH, -1))
        state, _ = jax.jit(lambda state: jax.lax.scan(step, state, stacked))(state)
    else:
        compiled = jax.jit(step, donate_argnums=0)
        for batch in micro_batches(x, y):
            state, _ = compiled(state, batch)
        assert compiled._cache_size() == 1
    assert_close([np.array(value) for value in state[0]], large.get_weights())


def test_state_under_a_loss_scale_outside():
    model = dense_model()
    inner = accumulating(keras.optimizers.SGD(0.05, momentum=0.9))
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    step, state = jax_step(model, optimizer)
    step = jax.jit(step)
    for batch in micro_batches(*rows()):
        state, _ = step(state, batch)
    # The gradients were not scaled up here, so the rate is a quarter.
    large, _ = fitted(keras.optimizers.SGD(0.0125, momentum=0.9), LARGE_BATCH, epochs=1)
    assert_close([np.array(value) for value in state[0]], large.get_weights())


def test_stateless_apply_checks_its_lists():
    optimizer = accumulating(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="must be called on a built optimizer"):
        optimizer.stateless_apply([], [], [])
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    with pytest.raises(ValueError, match=r"`optimizer_variables` must match optimizer\.variables"):
        optimizer.stateless_apply([], [np.ones(2)], [np.ones(2)])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_that_only_another_jitted_step_has_is_not_lost():
    def run(compiled):
        variables = [keras.Variable(np.ones(2, "float32")) for _ in range(3)]
        optimizer = accumulating(keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.1), 2)
        optimizer.build(variables)
        state = values_of(variables), values_of(optimizer.variables)

        def step(state, both):
            second = np.full(2, 3.0, "float32") if both else None
            gradients = [np.ones(2, "float32"), second, None]
            return optimizer.stateless_apply(state[1], gradients, state[0])

        if compiled:
            step = jax.jit(step, static_argnums=1)
        for both in (True, False, False, False, False, True, False, False):
            state = step(state, both)
        return [np.array(value) for value in state[0]]

    assert_close(run(compiled=True), run(compiled=False))


def test_flush_under_jit():
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    optimizer = accumulating(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    for gradient in (1.0, 3.0):
        optimizer.apply([np.full(2, gradient, "float32")] * 2, variables)

    @jax.jit
    def flush(trainable, state):
        mapping = [*zip(variables, trainable, strict=True)]
        mapping += zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(mapping) as scope:
            optimizer.flush()
        return [scope.get_current_value(variable) for variable in variables]

    flushed = flush(values_of(variables), values_of(optimizer.variables))
    assert flushed[0].tolist() == [-2.0, -2.0]
