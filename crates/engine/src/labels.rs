//! Labels: canonical form, reserved names, the labels the orchestrator derives, and the one match rule.
