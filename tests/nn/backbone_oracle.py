"""The formulas of the backbones in NumPy float64, sample by sample where that is plainer."""

from __future__ import annotations

import numpy as np
from flax import nnx

from jaxrec import nn

# -- parts -----------------------------------------------------------------------------------------


def wide(x):
    return np.asarray(x, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    """The approximation by a hyperbolic tangent."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def linear(layer, x):
    x = x @ wide(layer.kernel[...])
    return x if layer.bias is None else x + wide(layer.bias[...])


def mlp(layers, x, last=False):
    for number, layer in enumerate(layers.layers):
        x = linear(layer, x)
        if last or number + 1 < len(layers.layers):
            x = relu(x)
    return x


def layer_norm(norm, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * wide(norm.scale[...]) + wide(norm.bias[...])


def rms_norm(norm, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * wide(norm.scale[...])


def attention(query, key, value, mask, num_heads):
    """Attention of one sample's tokens, query by query and head by head."""
    out, size = np.zeros_like(query), query.shape[1] // num_heads
    for row in range(len(query)):
        seen = np.flatnonzero(mask[row])
        for head in range(num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = key[seen, part] @ query[row, part] / np.sqrt(size)
            out[row, part] = softmax(scores) @ value[seen, part]
    return out


def pooled(bags, features):
    """The sums of the rows of each bag, ``[batch, columns]``."""
    return np.concatenate(
        [
            [wide(bags.table(table.name))[bag].sum(0) for bag in features[name]]
            for table in bags.configs
            for name in table.feature_names
        ],
        axis=1,
    )


# -- click models ----------------------------------------------------------------------------------


def input_vectors(vectors, dense, embedded):
    columns = np.concatenate([mlp(vectors.bottom, dense, last=True), embedded], axis=1)
    return columns.reshape(len(columns), -1, vectors.dim)


def wukong_layer(layer, x):
    outputs = []
    for vectors in x:  # [n, dim]
        products = vectors @ vectors.T @ wide(layer.projection[...])
        machines = mlp(layer.mlp, layer_norm(layer.products_norm, products.ravel()))
        compressed = wide(layer.compression[...]).T @ vectors
        both = np.concatenate([machines.reshape(-1, x.shape[2]), compressed])
        shortcut = vectors
        if layer.residual is not None:
            shortcut = wide(layer.residual[...]).T @ vectors
        outputs.append(layer_norm(layer.norm, both + shortcut))
    return np.stack(outputs)


def wukong(model, dense, features):
    x = input_vectors(model.vectors, dense, pooled(model.embeddings, features))
    for layer in model.layers:
        x = wukong_layer(layer, x)
    return mlp(model.top, x.reshape(len(x), -1))[:, 0]


def of_token(layer, token, x):
    return x @ wide(layer.kernel[token]) + wide(layer.bias[token])


def rankmixer_block(block, x):
    samples, tokens, _ = x.shape
    outputs = np.zeros_like(x)
    for sample in range(samples):
        parts = [np.split(token, tokens) for token in x[sample]]
        for head in range(tokens):
            mixed = np.concatenate([parts[token][head] for token in range(tokens)])
            s = layer_norm(block.mixed_norm, mixed + x[sample, head])
            changed = of_token(block.out, head, gelu(of_token(block.hidden, head, s)))
            outputs[sample, head] = layer_norm(block.norm, changed + s)
    return outputs


def rankmixer(model, dense, features):
    columns = np.concatenate([dense, pooled(model.embeddings, features)], axis=1)
    size = -(-columns.shape[1] // model.num_tokens)
    columns = np.pad(columns, ((0, 0), (0, size * model.num_tokens - columns.shape[1])))
    pieces = np.split(columns, model.num_tokens, axis=1)
    x = np.stack([of_token(model.tokens, i, piece) for i, piece in enumerate(pieces)], axis=1)
    for block in model.blocks:
        x = rankmixer_block(block, x)
    return mlp(model.top, x.mean(1))[:, 0]


def masknet(model, dense, features):
    vectors = input_vectors(model.vectors, dense, pooled(model.embeddings, features))
    instance = vectors.reshape(len(vectors), -1)
    x = np.concatenate(
        [layer_norm(norm, vectors[:, i]) for i, norm in enumerate(model.norms)], axis=1
    )
    for block in model.blocks:
        x = relu(layer_norm(block.norm, linear(block.linear, mlp(block.mask, instance) * x)))
    return mlp(model.top, x)[:, 0]


def finalmlp(model, dense, features):
    embedded = pooled(model.embeddings, features)
    columns = np.concatenate([dense, embedded], axis=1)
    dim = model.embeddings.configs[0].embedding_dim
    contexts = (embedded[:, :dim], wide(model.gates[1].learned[...]))  # feature "a", and none
    x, y = (
        mlp(stream, 2 * sigmoid(mlp(gate.mlp, context)) * columns, last=True)
        for stream, gate, context in zip(model.streams, model.gates, contexts, strict=True)
    )
    fusion, logits = model.fusion, []
    for p, q in zip(x, y, strict=True):
        logit = linear(fusion.first, p) + linear(fusion.second, q)
        kernels = wide(fusion.kernel[...])
        parts = zip(kernels, np.split(p, len(kernels)), np.split(q, len(kernels)), strict=True)
        logits.append(logit[0] + sum(a @ kernel @ b for kernel, a, b in parts))
    return np.array(logits)


def gdcn(model, dense, features):
    first = x = np.concatenate([dense, pooled(model.embeddings, features)], axis=1)
    for layer, gate in zip(model.cross.cross.layers, model.cross.gates, strict=True):
        x = first * linear(layer, x) * sigmoid(linear(gate, x)) + x
    deep = mlp(model.deep, first, last=True)
    return linear(model.head, np.concatenate([x, deep], axis=1))[:, 0]


def pepnet(model, dense, features, stopped=None):
    """The logits; ``stopped`` are the values of what is not differentiated, of another call."""
    embedded = pooled(model.embeddings, features)
    dim = model.embeddings.configs[0].embedding_dim
    columns = np.concatenate([dense, embedded], axis=1)

    def gate(unit, *inputs):
        return 2 * sigmoid(mlp(unit.mlp, np.concatenate(inputs, axis=1)))

    of_columns = columns if stopped is None else stopped[0]
    gated = gate(model.domain_gate, embedded[:, dim:], of_columns) * columns  # domain "b"
    of_gated = gated if stopped is None else stopped[1]
    tasks = []
    for layers, gates, head in zip(model.layers, model.gates, model.heads, strict=True):
        hidden = gated
        for layer, unit in zip(layers, gates, strict=True):
            hidden = gate(unit, embedded[:, :dim], of_gated) * relu(linear(layer.linear, hidden))
        tasks.append(linear(head, hidden)[:, 0])
    return np.stack(tasks, axis=1), (columns, gated)


# -- models of histories ---------------------------------------------------------------------------


def histories(model, features):
    """For each sample its history's last items, the target, and all but the history."""
    rows = wide(model.items.table("item"))
    profile = pooled(model.profile, features)
    for place, (items, (target,)) in enumerate(
        zip(features["history"], features["target"], strict=True)
    ):
        history = rows[items[-MAX_LENGTH:]] if items else np.zeros((0, rows.shape[1]))
        yield history, rows[target], np.concatenate([rows[target], profile[place]])


MAX_LENGTH = 4  # of the models of `tests.nn.cases`


def token_block(block, tokens, seen, mask):
    pre = block.norm == "pre"
    x, y = ((layer_norm(block.attention_norm, z) if pre else z) for z in (tokens, seen))
    keys, values = linear(block.key, y), linear(block.value, y)
    attended = attention(linear(block.query, x), keys, values, mask, block.num_heads)
    x = tokens + linear(block.out, attended)
    x = x if pre else layer_norm(block.attention_norm, x)
    y = layer_norm(block.dense_norm, x) if pre else x
    x = x + linear(block.last, relu(linear(block.hidden, y)))
    return x if pre else layer_norm(block.dense_norm, x)


def transact(model, features):
    logits = []
    for history, target, others in histories(model, features):
        x = np.concatenate([history, np.tile(target, (len(history), 1))], axis=1)
        for block in model.blocks:
            x = token_block(block, x, x, np.ones((len(x), len(x)), bool))
        width = 2 * len(target)
        largest = linear(model.pooled, x.max(0) if len(x) else np.zeros(width))
        newest = np.concatenate([np.zeros((2, width)), x])[-2:].ravel()
        first = y = np.concatenate([newest, largest, others])
        for layer in model.cross.layers:
            y = first * linear(layer, y) + y
        logits.append(mlp(model.top, y)[0])
    return np.array(logits)


def longer(model, features):
    logits, merge = [], model.merge
    for history, target, others in histories(model, features):
        missing = MAX_LENGTH - len(history)
        merged = []
        for start in range(0, MAX_LENGTH, merge):
            places = [i for i in range(start, start + merge) if i >= missing]
            if not places:
                continue  # before the first item
            x = np.array([history[i - missing] + wide(model.positions[i]) for i in places])
            x = token_block(model.inner, x, x, np.ones((len(x), len(x)), bool))
            x = np.concatenate([np.zeros((merge - len(x), x.shape[1])), x])
            merged.append(linear(model.merged, x.ravel()))
        tokens = [
            linear(model.target, target),
            linear(model.others, others),
            wide(model.learned[0]),
        ]
        x = np.array(merged + tokens)
        count = len(merged)
        mask = np.tri(len(x), dtype=bool)  # the history sees itself and what is earlier
        mask[count:] = True
        queries = min(1, count) + len(tokens)
        x = token_block(model.blocks[0], x[-queries:], x, mask[-queries:])
        for block in model.blocks[1:]:
            x = token_block(block, x, x, mask[-queries:, -queries:])
        x = layer_norm(model.norm, x[-len(tokens) :]).ravel()
        logits.append(mlp(model.top, np.concatenate([x, others]))[0])
    return np.array(logits)


def mixed(layer, x, num_shared):
    rows = [linear(layer.shared, token) for token in x[:num_shared]]
    rows += [of_token(layer.own, i, token) for i, token in enumerate(x[num_shared:])]
    return np.array(rows)


def onetrans(model, features):
    logits = []
    for history, _, others in histories(model, features):
        positions = wide(model.positions[...])[MAX_LENGTH - len(history) :]
        events = linear(model.event, history) + positions
        x = np.concatenate([events, linear(model.split, others).reshape(2, -1)])
        for block, kept in zip(model.blocks, (2, 0), strict=True):
            before, kept = len(x) - 2, min(kept, len(x) - 2)
            y = rms_norm(block.attention_norm, x)
            x, asking = x[before - kept :], y[before - kept :]
            mask = np.tri(len(y), dtype=bool)[before - kept :]
            keys, values = mixed(block.key, y, before), mixed(block.value, y, before)
            attended = attention(mixed(block.query, asking, kept), keys, values, mask, 2)
            x = x + mixed(block.out, attended, kept)
            hidden = relu(mixed(block.hidden, rms_norm(block.dense_norm, x), kept))
            x = x + mixed(block.last, hidden, kept)
        logits.append(mlp(model.top, rms_norm(model.norm, x).ravel())[0])
    return np.array(logits)


CLICK_MODELS = {
    nn.Wukong: wukong,
    nn.RankMixer: rankmixer,
    nn.MaskNet: masknet,
    nn.FinalMLP: finalmlp,
    nn.GDCN: gdcn,
    nn.PEPNet: pepnet,
}
HISTORY_MODELS = {nn.TransAct: transact, nn.LONGER: longer, nn.OneTrans: onetrans}
FORMULAS: dict[type[nnx.Module], object] = CLICK_MODELS | HISTORY_MODELS
