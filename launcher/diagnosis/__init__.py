"""What a log says afterwards: when it went wrong, why, and what to do. No Ray, no torch, no network."""
