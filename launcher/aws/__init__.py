"""The AWS account: sessions, stack, instance types, images, prices and quotas."""
