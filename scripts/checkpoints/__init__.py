"""What the operator's tools for checkpoints share.

Which trial is meant (`arguments`), which checkpoint is chosen (`choosing`), what a run would resume from
(`resume_source`), what is shown (`display`), and the set-up of AReaL's recover folder (`areal_setup`, `dcp`). May
import all of `launcher`. Begin with `choosing`; what is good is decided in `launcher/checkpoints/checkpoint_catalog`.
"""
