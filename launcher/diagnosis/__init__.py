"""What a log says afterwards: read it, find when it went wrong and why, and what to do. No Ray, no torch, no network."""
