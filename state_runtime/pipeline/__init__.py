"""What a user writes and what is made of it: plan, steps, compilation, sources, sinks, watermark, compatibility."""
