//! What holds for every source that opened.
#![allow(unreachable_pub)] // Included by binaries, which export nothing.

use loquat::weights::WeightSource;

/// Each name finds its tensor, and each tensor has the bytes that its shape and format demand.
pub fn check(source: &dyn WeightSource) {
    let mut total_bytes = 0;
    let mut touched = 0u64;
    for name in source.names() {
        let view = source.tensor(name).expect("a listed name has a tensor");
        assert_eq!(view.format.bytes_of(view.len()), Some(view.bytes.len()), "{name}");
        assert_eq!(view.is_empty(), view.bytes.is_empty(), "{name}");
        total_bytes += view.bytes.len() as u64;
        touched += view.bytes.first().map_or(0, |&b| u64::from(b)) + view.bytes.last().map_or(0, |&b| u64::from(b));
        source.release(name);
    }
    std::hint::black_box(touched);
    assert_eq!(source.total_bytes(), total_bytes);
    assert!(source.tensor("\u{0}no such tensor").is_none());
}
