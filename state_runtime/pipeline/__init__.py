"""A user's pipeline and what it is compiled to: plan, steps, compilation, sources, sinks, watermark, compatibility."""
