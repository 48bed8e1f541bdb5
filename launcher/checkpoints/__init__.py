"""Checkpoints: on the disk, in memory, and at a URL.

How they are written (`checkpoint_store`, `manifest`, `in_memory_checkpoints`, `uploads`), verified (`verification`),
and which of them are good (`checkpoint_catalog`, which the run, retention and every tool ask; by what files show of the
run's health, `health_evidence`). Also what is read of
models (`model_files`, `model_shape`, `tensor_files`) and of AReaL's own folders (`areal_folders`). May import
`run_files`, `policy`, `config` and `base`; no torch. Begin with `checkpoint_catalog` and `checkpoint_store`.
"""
