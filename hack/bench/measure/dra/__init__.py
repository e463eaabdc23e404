"""What resources that are offered by DRA attain, and what they cost the cluster."""
