//! Chat templates through the public API: the golden renderings, templates in the manner of the common families, and templates
//! that mean harm.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "what test files share is public to nobody else, and tests unwrap")]

use loquat::TextError;
use loquat::text::{ChatTemplate, Message, RenderOptions};
use serde_json::{Value, json};

mod common;

use common::text::{check_golden_chat, fixture};

fn messages(list: &[(&str, &str)]) -> Vec<Message> {
    list.iter().map(|&(role, content)| Message::new(role, content)).collect()
}

fn options() -> RenderOptions {
    RenderOptions { bos_token: "<s>".into(), eos_token: "</s>".into(), ..RenderOptions::default() }
}

fn render(source: &str, list: &[(&str, &str)]) -> Result<String, TextError> {
    ChatTemplate::new(source)?.render(&messages(list), &options())
}

/// A template over no messages.
fn expand(source: &str) -> Result<String, TextError> {
    render(source, &[])
}

fn fails(source: &str, part: &str) {
    match expand(source) {
        Err(TextError::Template { message }) => assert!(message.contains(part), "{message:?} does not name {part:?}"),
        other => panic!("{source:?}: {other:?}"),
    }
}

#[test]
fn renderings_equal_the_reference() {
    let golden = fixture("smollm2/tokenizer.json");
    let template = ChatTemplate::new(golden["chat_template"].as_str().unwrap()).unwrap();
    check_golden_chat(&template, &golden);
}

const MISTRAL: &str = "{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}";

#[test]
fn alternation_is_enforced() {
    let ok = render(MISTRAL, &[("user", "a"), ("assistant", "b"), ("user", "c")]).unwrap();
    assert_eq!(ok, "<s>[INST] a [/INST]b</s>[INST] c [/INST]");
    for wrong in [&[("user", "a"), ("user", "b")][..], &[("assistant", "a")], &[("system", "x"), ("user", "a")]] {
        let Err(TextError::Template { message }) = render(MISTRAL, wrong) else { panic!("{wrong:?} was accepted") };
        assert!(message.contains("roles must alternate"), "{message}");
    }
}

const GEMMA: &str =
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {%- if (message['role'] == 'assistant') %}
        {%- set role = 'model' %}
    {%- else %}
        {%- set role = message['role'] %}
    {%- endif %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

#[test]
fn system_is_refused_where_the_model_knows_none() {
    let ok = render(GEMMA, &[("user", " hi "), ("assistant", "yo")]).unwrap();
    assert_eq!(ok, "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n<start_of_turn>model\n");
    let error = render(GEMMA, &[("system", "x")]).unwrap_err();
    assert!(error.to_string().contains("System role not supported"), "{error}");
}

const LLAMA3: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- The system message. {% endfor %} #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Tools:\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

#[test]
fn tools_dates_and_calls() {
    let template = ChatTemplate::new(LLAMA3).unwrap();
    let mut call = Message::new("assistant", "");
    call.extra.insert("tool_calls".into(), json!([{"function": {"name": "f", "arguments": {"z": 1, "a": "<é>'"}}}]));
    let list = [Message::new("system", " be kind "), Message::new("user", "hi"), call];
    let with =
        RenderOptions { tools: Some(json!([{"name": "f", "b": [1, {}], "a": null}])), now: Some((86_400 * 365, 0)), ..options() };
    assert_eq!(
        template.render(&list, &with).unwrap(),
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 01 Jan 1971\n\nTools:\n{\n    \"name\": \"f\",\n    \"b\": [\n        1,\n        {}\n    ],\n    \"a\": null\n}\n\nbe kind<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>{\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": \"<é>'\"}}<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    // Without a time the template writes its own date.
    let bare = template.render(&messages(&[("user", "hi")]), &options()).unwrap();
    assert!(bare.contains("Today Date: 26 Jul 2024"), "{bare}");
    let mut two = Message::new("assistant", "");
    two.extra.insert("tool_calls".into(), json!([1, 2]));
    assert!(template.render(&[two], &options()).unwrap_err().to_string().contains("single tool-calls"));
    fails("{{ strftime_now('%Y') }}", "strftime_now");
}

const QWEN: &str = r#"{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- '\n<tool_call>\n' ~ (tool_call.function | default(tool_call) | tojson) ~ '\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {%- endgeneration %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"#;

#[test]
fn namespaces_tool_loops_and_generation_tags() {
    let template = ChatTemplate::new(QWEN).unwrap();
    let mut call = Message::new("assistant", "<think>hm</think>\n\nok");
    call.extra.insert("tool_calls".into(), json!([{"function": {"name": "f", "arguments": {}}}]));
    let list = [Message::new("user", "q"), call, Message::new("tool", "1"), Message::new("tool", "2")];
    let mut with = options();
    with.extra.insert("enable_thinking".into(), false.into());
    assert_eq!(
        template.render(&list, &with).unwrap(),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nok\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
}

#[test]
fn what_templates_of_published_models_use() {
    let check = |source: &str, expected: &str| assert_eq!(expand(source).unwrap(), expected, "{source}");
    check(
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "013",
    );
    check(
        "{{ {'b': 1, 'a': [true, none, 1.5, 'x\"<\\'>&é']} | tojson }}",
        "{\"b\": 1, \"a\": [true, null, 1.5, \"x\\\"<'>&é\"]}",
    );
    check("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", "{\"a\":2,\"b\":1}");
    check("{{ ['é', '🙂'] | tojson(ensure_ascii=true) }}", "[\"\\u00e9\", \"\\ud83d\\ude42\"]");
    check("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}{{ [1] | tojson(indent=2) }}", "[]{}[\n  1\n]");
    check("{{ [{'a': 1}, {'a': 2}] | rejectattr('a', 'equalto', 1) | map(attribute='a') | list }}", "[2]");
    check("{{ [{'r': 'x'}, {'r': 'y'}] | selectattr('r', '==', 'y') | list | length }}", "1");
    check("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3");
    check("{{ 'a,b'.split(',')[1].upper() }}{{ ' x '.strip() }}{{ 'abc'.replace('b', '-') }}", "Bxa-c");
    check("{% for k, v in {'z': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "z1a2");
    check("{{ true }} {{ none }} {{ 1.0 }} {{ 'x' if false }}", "True None 1.0 ");
    check("{{ absent }}{{ absent is defined }}{% for x in absent %}{% endfor %}", "False");
    check("{% macro m(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ m('a') }}", "ad");
    check("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc");
    check("{{ '<b>&' }}{{ '<b>' | e }}", "<b>&&lt;b&gt;");
    check("{% generation %}x{% endgeneration %}", "x");
    check("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}", "<s></s>TrueTrue");
    check("{% set ns = namespace(x=[1, 2][1:], y=0) %}{% set ns.y = ns.x[0] %}{{ ns.y }}", "2");
    check("{% set x %}a{% endset -%}\n{%- set y = [1, 2, 3][1:] -%}\n b{{ x }}{{ y }}{{ (y + [4]) | length }}", "ba[2, 3]3");
    check("{%- for k, v in {'a': [1]} | items -%} {{ k }}{{ v[0] }} {%- endfor %}\nx", "a1x");
    check("{{ [1, 2] | sum }} {{ [{'a': 1.5}, {'a': 1}] | sum(attribute='a', start=2) }}", "3 4.5");
    check("{% set x %}a{{ 1 }}{% endset %}{{ x }}", "a1");
    check("{{ messages | length }}{{ 'x' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ [1,2][-1] }}", "0TrueTrueTrue2");
}

#[test]
fn what_is_wrong_is_an_error() {
    fails("{% if true %}", "");
    fails("{{ 1 +", "");
    fails("{% nonesuch %}", "nonesuch");
    fails("{{ x | nonesuch }}", "nonesuch");
    fails("{{ nonesuch() }}", "nonesuch");
    fails("{{ absent.attribute }}", "undefined");
    fails("{{ absent + 'x' }}", "");
    fails("{{ raise_exception('no way') }}", "no way");
    fails("{% include 'other' %}", "");
    fails("{{ 'x'.nonesuch() }}", "nonesuch");
    fails("{% generation %}", "");
    assert!(matches!(ChatTemplate::from_named([]), Err(TextError::Absent { .. })));
    let template = ChatTemplate::from_named([("default", "d"), ("tool_use", "t"), ("rag", "r")]).unwrap();
    let with = |tools: Option<Value>, name: Option<&str>| {
        template.render(&[], &RenderOptions { tools, template: name.map(String::from), ..options() })
    };
    assert_eq!(with(None, None).unwrap(), "d");
    assert_eq!(with(Some(json!([])), None).unwrap(), "t");
    assert_eq!(with(Some(json!([])), Some("rag")).unwrap(), "r");
    assert!(with(None, Some("nope")).unwrap_err().to_string().contains("rag"));
    assert_eq!(template.names().collect::<Vec<_>>(), ["default", "rag", "tool_use"]);
}

#[test]
fn every_optional_variable_may_be_missing() {
    for source in [MISTRAL, GEMMA, LLAMA3, QWEN] {
        let template = ChatTemplate::new(source).unwrap();
        for bits in 0..16 {
            let given = |bit: usize| bits >> bit & 1 == 1;
            let with = RenderOptions {
                bos_token: if given(0) { "<s>".into() } else { String::new() },
                eos_token: if given(1) { "</s>".into() } else { String::new() },
                tools: given(2).then(|| json!([])),
                now: given(3).then_some((0, 0)),
                ..RenderOptions::default()
            };
            template.render(&messages(&[("user", "a"), ("assistant", "b"), ("user", "c")]), &with).unwrap();
        }
    }
}

#[test]
fn templates_in_tokenizer_config() {
    let from = |value: Value| ChatTemplate::from_config(&json!({ "chat_template": value }));
    assert!(from(Value::Null).unwrap().is_none());
    assert!(ChatTemplate::from_config(&json!({})).unwrap().is_none());
    assert_eq!(from(json!("x")).unwrap().unwrap().source("default"), Some("x"));
    let named = from(json!([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])).unwrap().unwrap();
    assert_eq!(named.names().count(), 2);
    for wrong in [json!(1), json!([1]), json!([{"name": "x"}]), json!("{% if %}"), json!([])] {
        assert!(from(wrong).is_err());
    }
}

#[test]
fn hostile_templates_end() {
    let start = std::time::Instant::now();
    let harm = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999999999) %}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{{ ['x'] * 9999999999 }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}{{ ns.x | tojson }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in [[[1]]] recursive %}{{ loop([a]) }}{% endfor %}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ 'x'.join(range(100000)) * 100000 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ ([[1] * 100000] * 100000) | sum(start=[]) | length }}",
        "{{ 'a\\nb' | indent(999999999) }}",
        "{{ [1] | batch(99999999, 'x') | list | length }}",
        "{{ range(100000) | map('string') | join('x' * 100000) }}",
        "{% for a in range(100000) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' * 1000 }}{% endfor %}",
        "{{ [1] | tojson(indent=999999999) }}",
    ];
    for source in harm {
        let start = std::time::Instant::now();
        fails(source, "");
        assert!(start.elapsed().as_secs() < 20, "{source}: {:?}", start.elapsed());
    }
    for (open, close) in [("(", ")"), ("[", "]"), ("{'a':", "}"), ("-", ""), ("not ", "")] {
        let source = format!("{{{{ {}1{} }}}}", open.repeat(50_000), close.repeat(50_000));
        let _ = expand(&source);
    }
    let _ = expand(&"{% if true %}".repeat(20_000));
    fails(&format!("{{% if x %}}{}{{% endif %}}", "{% elif y %}".repeat(10_000)), "elif");
    for part in [" + 1", ".a", "|trim", " ~ 'a'", " if x else y", "[0]", " and x", "()"] {
        fails(&format!("{{{{ x{} }}}}", part.repeat(50_000)), "words");
        let _ = expand(&format!("{{{{ x{} }}}}", part.repeat(300)));
    }
    for sign in ["-", "not "] {
        fails(&format!("{{{{ {}x }}}}", sign.repeat(100_000)), "words");
        let _ = expand(&format!("{{{{ {}x }}}}", sign.repeat(990)));
    }
    assert!(ChatTemplate::new(&"x".repeat(2 << 20)).is_err());
    let mut deep = json!(1);
    for _ in 0..100 {
        deep = json!([deep]);
    }
    let template = ChatTemplate::new("{{ messages }}").unwrap();
    assert!(template.render_json(&deep, &options()).is_err());
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

/// Values nested a hundred thousand deep would overflow the stack when they are dropped.
#[test]
fn nesting_is_bounded() {
    for source in [
        "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(90000) %}{% set ns.x = ns.x + [1] %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = namespace(y=ns.x) %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for a in range(90000) %}{% set ns.x = (ns.x, 1) %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns }}",
        "{% macro m(x) %}{{ m([x, x]) }}{% endmacro %}{{ m(1) }}",
        "{% for a in [1] recursive %}{{ loop([[a] + [a]]) }}{% endfor %}",
    ] {
        fails(source, "");
    }
    let _ = expand(&format!("{{% set x = 1 %}}{}", "{% set x = [x] %}".repeat(60_000)));
    // Operators that pass a list through, over and over: they end, whether with an error or not.
    for step in [
        "ns.x[0:]",
        "ns.x | map('string')",
        "ns.x | reverse",
        "ns.x * 1",
        "ns.x | list",
        "[(ns.x | first)[0:] | map('list')]",
        "{'a': ns.x[0:]}",
    ] {
        let _ = expand(&format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for a in range(90000) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        ));
    }
}
