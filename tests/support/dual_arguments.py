"""Arguments of language models of the package `dual-attention`, with relational heads and without."""

D, VOCAB = 16, 11
SYMBOLS = {"d_model": D, "n_heads": 4, "n_symbols": 6, "trainable_symbols": False}
SIZES = {"vocab_size": VOCAB, "d_model": D, "max_block_size": 12}
BLOCK = {"dropout_rate": 0.0, "norm_first": True, "bias": False, "pos_enc_type": "RoPE"}
CONFIG = {**SIZES, **BLOCK, "n_layers": 3, "n_heads_sa": 2, "n_heads_ra": 2, "dff": None, "activation": "gelu"}
CONFIG |= {"symbol_retrieval": "symbolic_attention", "symbol_retrieval_kwargs": SYMBOLS}
CONFIG |= {"symbol_retriever_config": {"shared_symbol_retriever": True, "weight_tie_symbol_library": False}}
CONFIG |= {"sa_kwargs": {"n_kv_heads": 1}}
CONFIG |= {"ra_kwargs": {"n_kv_heads": 1, "n_relations": 4, "symmetric_rels": True}}
PLAIN = {**SIZES, **BLOCK, "n_layers": 2, "n_heads": 4, "dff": 20, "activation": "relu"}
