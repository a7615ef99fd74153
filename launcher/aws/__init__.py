"""What the launcher knows of an AWS account: sessions, stack, instance types, images, money."""
