//! Bytes as a template and messages: it renders or says why not, and it ends.

use loquat::text::{ChatTemplate, Message, RenderOptions};
use serde_json::json;

/// The template up to the first unit separator, then messages of role and content.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split('\u{1f}');
    let source = parts.next().unwrap_or_default();
    let Ok(template) = ChatTemplate::new(source) else { return };
    let mut messages = Vec::new();
    while let Some(role) = parts.next() {
        messages.push(Message::new(role, parts.next().unwrap_or_default()));
    }
    let options = RenderOptions {
        bos_token: "<s>".into(),
        tools: messages.first().map(|message| json!([{ "name": message.role }])),
        now: Some((data.len() as i64 * 1_000_003, 0)),
        ..RenderOptions::default()
    };
    let first = template.render(&messages, &options);
    let second = template.render(&messages, &options);
    assert_eq!(first.is_ok(), second.is_ok(), "two renderings differ");
    if let (Ok(first), Ok(second)) = (first, second) {
        assert_eq!(first, second, "two renderings differ");
    }
}
