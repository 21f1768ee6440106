use super::*;

const KEY: RootKey = RootKey { key: 7, regime: 0 };

#[test]
fn two_keys_do_not_see_each_other() {
    let mut tree = RadixTree::new(4, 2, 1).unwrap();
    let keys = [KEY, RootKey { key: 8, ..KEY }, RootKey { regime: 1, ..KEY }];
    let mut made = Vec::new();
    for key in keys {
        assert_eq!(tree.find(None, key, &[1, 2]), None);
        made.push(tree.insert(None, key, &[1, 2]).unwrap());
        tree.check();
    }
    for (key, node) in keys.into_iter().zip(made) {
        assert_eq!(tree.find(None, key, &[1, 2, 3]), Some((node, 2)));
    }
    assert_eq!(tree.find(None, RootKey { key: 6, ..KEY }, &[1, 2]), None);
}
