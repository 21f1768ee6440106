//! Storage formats: what the bytes of a block mean. (Being written.)
