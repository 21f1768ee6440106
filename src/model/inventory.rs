//! Which tensor of the files plays which role, with its shape checked. Every tensor of the file is used, or known to be of no
//! use, or an error.
#![forbid(unsafe_code)]

use super::ModelFiles;
use super::parts::{Header, Part};
use super::tensors::{Attn, FeedForward, Gated, Layer, Listed, Norm, Tensors, Vector, Visit};
use crate::arch::{AttnSpec, Ffn, KvLayout, LayerSpec, ModelSpec, Naming, NormSpan, NormSpec, QkNorm, Role, Stored};
use crate::backend::RowOrder;
use crate::error::LoadError;
use std::collections::HashSet;

/// Finds every tensor that the spec asks for and checks its shape.
///
/// # Errors
/// Tensors that are missing, too many, or of another shape than the configuration says.
pub(super) fn inventory(files: &ModelFiles) -> Result<Tensors<Listed>, LoadError> {
    let spec = files.spec();
    let find = Find { files, layer: 0 };
    let matrix = |role| -> Result<Vec<Part>, LoadError> { Ok(vec![find.part(role, &[spec.vocab, spec.hidden])?]) };
    let inventory = Tensors {
        embed: matrix(Role::Embed)?,
        positions: match spec.position_table {
            true => Some(vec![find.part(Role::Positions, &[spec.context, spec.hidden])?]),
            false => None,
        },
        layers: (0..spec.layers.len()).map(|layer| Find { files, layer }.layer(spec)).collect::<Result<_, _>>()?,
        final_norm: find.norm([Role::FinalNorm, Role::FinalNormBias], &spec.final_norm, spec.hidden)?,
        head: if spec.head.tied { None } else { Some(matrix(Role::Head)?) },
        head_bias: find.vector_if(spec.head.bias, Role::HeadBias, spec.vocab)?,
    };
    let mut used = Used(HashSet::new());
    inventory.visit(&mut used)?;
    let (arch, naming) = (files.arch(), files.naming());
    // A tied model's file may repeat its head; rotary divisors were read with the configuration.
    let spare: Vec<_> = [Role::Head, Role::RopeFactors, Role::RopeShort, Role::RopeLong]
        .into_iter()
        .flat_map(|role| arch.names(role, 0, 0, naming))
        .collect();
    let known =
        |name: &str| used.0.contains(name) || spare.iter().any(|(s, _)| s == name) || arch.ignores(name, spec.layers.len());
    match files.weights().names().chain(files.weights().packed_names()).find(|name| !known(name)) {
        None => Ok(inventory),
        Some(name) => Err(LoadError::ExtraTensor { name: name.to_owned(), arch: arch.name.to_owned() }),
    }
}

/// Looks tensors up by role.
#[derive(Clone, Copy)]
struct Find<'a> {
    files: &'a ModelFiles,
    layer: usize,
}

/// The roles of a gated feed-forward's tensors.
struct GatedRoles {
    fused: [Role; 2],
    gate: [Role; 2],
    up: [Role; 2],
    down: [Role; 2],
}

impl<'a> Find<'a> {
    fn layer(&self, spec: &ModelSpec) -> Result<Layer<Listed>, LoadError> {
        let layer = &spec.layers[self.layer];
        let (LayerSpec { attn, ffn, wiring }, hidden) = (layer, spec.hidden);
        let dims = attn.dims();
        let norm = |norm: &Option<NormSpec>, roles: [Role; 2]| norm.as_ref().map(|n| self.norm(roles, n, hidden)).transpose();
        let value = if let KvLayout::Latent { value_dim, .. } = attn.layout { value_dim } else { dims.v_dim };
        Ok(Layer {
            attn_in: norm(&wiring.attn_in, [Role::AttnNorm, Role::AttnNormBias])?,
            attn: self.attn(attn, hidden)?,
            out: vec![self.part(Role::AttnOut, &[hidden, attn.heads * value])?],
            out_bias: self.vector_if(attn.out_bias, Role::AttnOutBias, hidden)?,
            sinks: self.vector_if(attn.sinks, Role::Sinks, attn.heads)?,
            // No family has a bias on these.
            attn_out: norm(&wiring.attn_out, [Role::AttnResultNorm; 2])?,
            ffn_in: norm(&wiring.ffn_in, [Role::FfnNorm, Role::FfnNormBias])?,
            ffn: self.feed_forward(ffn, hidden)?,
            ffn_out: norm(&wiring.ffn_out, [Role::FfnResultNorm; 2])?,
        })
    }

    fn attn(&self, a: &AttnSpec, hidden: usize) -> Result<Attn<Listed>, LoadError> {
        let KvLayout::Latent { rank, rope_dim, nope_dim, value_dim, q_rank } = a.layout else { return self.heads(a, hidden) };
        let norm = a.latent_norm.expect("a layout of latents has a norm on them");
        let q = a.heads * (nope_dim + rope_dim);
        let order = RowOrder::Rolled { heads: a.heads, by: nope_dim };
        let (mut into, mut out_of) = (Vec::with_capacity(a.heads), Vec::with_capacity(a.heads));
        let both = self.look(Role::LatentUp, 0);
        for h in 0..a.heads {
            let (key, value) = match &both {
                // Key and value of a head lie together, the key the other way round.
                Some((name, view, _)) => {
                    let (height, first) = (nope_dim + value_dim, h * (nope_dim + value_dim) * rank);
                    self.fits(name, *view, &[a.heads * height, rank])?;
                    let part = |first, rows| Part::of(Role::LatentUp, name.clone(), *view, first, &[rows, rank]);
                    (part(first, nope_dim)?.absorbed(rope_dim, false), part(first + nope_dim * rank, value_dim)?)
                }
                None => {
                    let key = self.nth(Role::LatentKey, h, a.heads, &[rank, nope_dim])?;
                    (key.absorbed(rope_dim, true), self.nth(Role::LatentValue, h, a.heads, &[value_dim, rank])?)
                }
            };
            into.push(vec![key]);
            out_of.push(vec![value]);
        }
        let (q_down, q) = match q_rank {
            None => (None, self.part(Role::Query, &[q, hidden])?),
            Some(r) => {
                let down = vec![self.part(Role::QueryDown, &[r, hidden])?];
                (Some((down, self.vector(Role::QueryDownNorm, r, &norm)?)), self.part(Role::QueryUp, &[q, r])?)
            }
        };
        Ok(Attn::Latent {
            q_down,
            q: vec![q.ordered(order)],
            kv: vec![self.part(Role::LatentDown, &[rank + rope_dim, hidden])?],
            kv_norm: self.vector(Role::LatentNorm, rank, &norm)?,
            into,
            out_of,
        })
    }

    fn heads(&self, a: &AttnSpec, hidden: usize) -> Result<Attn<Listed>, LoadError> {
        let dims = a.dims();
        let (q, k, v) = (dims.heads * dims.qk_dim, dims.kv_heads * dims.qk_dim, dims.kv_heads * dims.v_dim);
        // One tensor or three, of matrices or of biases.
        let three = |roles: [Role; 4], columns: &[usize]| -> Result<Vec<Part>, LoadError> {
            let shape = |rows| [&[rows], columns].concat();
            if self.look(roles[0], 0).is_some() {
                let queries = dims.heads / dims.kv_heads;
                let order = match self.stored().grouped_qkv {
                    true => RowOrder::Grouped { groups: dims.kv_heads, queries },
                    false => RowOrder::Natural,
                };
                return Ok(vec![self.part(roles[0], &shape(q + k + v))?.ordered(order)]);
            }
            Ok(vec![
                self.part(roles[1], &shape(q))?.ordered(self.turn(dims.heads)),
                self.part(roles[2], &shape(k))?.ordered(self.turn(dims.kv_heads)),
                self.part(roles[3], &shape(v))?,
            ])
        };
        let bias = || three([Role::QkvBias, Role::QueryBias, Role::KeyBias, Role::ValueBias], &[]);
        Ok(Attn::Heads {
            qkv: three([Role::Qkv, Role::Query, Role::Key, Role::Value], &[hidden])?,
            qkv_bias: if a.qkv_bias { Some(Vector { parts: bias()?, len: q + k + v, plus: 0.0 }) } else { None },
            q_norm: self.head_norms(a.qk_norm.as_ref(), Role::QueryNorm, dims.heads, dims.qk_dim)?,
            k_norm: self.head_norms(a.qk_norm.as_ref(), Role::KeyNorm, dims.kv_heads, dims.qk_dim)?,
        })
    }

    fn head_norms(&self, norm: Option<&QkNorm>, role: Role, heads: usize, dim: usize) -> Result<Vec<Vector>, LoadError> {
        let Some(QkNorm { norm, span }) = norm else { return Ok(Vec::new()) };
        match span {
            NormSpan::Head => Ok(vec![self.vector(role, dim, norm)?]),
            NormSpan::All => Ok(vec![self.vector(role, heads * dim, norm)?]),
            NormSpan::OwnHead => (0..heads)
                .map(|h| Ok(Vector { parts: vec![self.nth(role, h, heads, &[dim])?], len: dim, plus: norm.plus }))
                .collect(),
        }
    }

    fn feed_forward(&self, ffn: &Ffn, hidden: usize) -> Result<FeedForward<Listed>, LoadError> {
        Ok(match ffn {
            Ffn::Gated { intermediate, bias, .. } => {
                FeedForward::Gated(self.gated(&GATED, None, hidden, *intermediate, *bias)?)
            }
            Ffn::Plain { intermediate, bias, .. } => FeedForward::Plain {
                up: vec![self.part(Role::Up, &[*intermediate, hidden])?],
                up_bias: self.vector_if(*bias, Role::UpBias, *intermediate)?,
                down: vec![self.part(Role::Down, &[hidden, *intermediate])?],
                down_bias: self.vector_if(*bias, Role::DownBias, hidden)?,
            },
            Ffn::Moe { route, intermediate, bias, shared, .. } => FeedForward::Moe {
                router: vec![self.part(Role::Router, &[route.experts, hidden])?],
                router_bias: self.vector_if(*bias, Role::RouterBias, route.experts)?,
                correction: self.vector_if(route.correction, Role::RouterCorrection, route.experts)?,
                experts: (0..route.experts)
                    .map(|n| self.gated(&EXPERT, Some((n, route.experts)), hidden, *intermediate, *bias))
                    .collect::<Result<_, _>>()?,
                shared: match shared {
                    0 => None,
                    width => Some(self.gated(&SHARED, None, hidden, *width, false)?),
                },
            },
        })
    }

    /// `nth` is the number of an expert and how many there are.
    fn gated(
        &self,
        roles: &GatedRoles,
        nth: Option<(usize, usize)>,
        hidden: usize,
        width: usize,
        bias: bool,
    ) -> Result<Gated<Listed>, LoadError> {
        let part = |role, shape: &[usize]| match nth {
            Some((n, of)) => self.nth(role, n, of, shape),
            None => self.part(role, shape),
        };
        // i: 0 for the matrices, 1 for the biases.
        let both = |i: usize, columns: &[usize]| -> Result<Vec<Part>, LoadError> {
            let shape = |rows| [&[rows], columns].concat();
            if self.look(roles.fused[i], nth.map_or(0, |(n, _)| n)).is_some() {
                let order = match self.stored().alternating_gate_up {
                    true => RowOrder::Interleaved { heads: 1 },
                    false => RowOrder::Natural,
                };
                return Ok(vec![part(roles.fused[i], &shape(2 * width))?.ordered(order)]);
            }
            Ok(vec![part(roles.gate[i], &shape(width))?, part(roles.up[i], &shape(width))?])
        };
        let vector = |parts, len| Vector { parts, len, plus: 0.0 };
        Ok(Gated {
            gate_up: both(0, &[hidden])?,
            gate_up_bias: if bias { Some(vector(both(1, &[])?, 2 * width)) } else { None },
            down: vec![part(roles.down[0], &[hidden, width])?],
            down_bias: if bias { Some(vector(vec![part(roles.down[1], &[hidden])?], hidden)) } else { None },
        })
    }

    fn norm(&self, [weight, bias]: [Role; 2], norm: &NormSpec, width: usize) -> Result<Norm<Listed>, LoadError> {
        Ok(Norm { weight: self.vector(weight, width, norm)?, bias: self.vector_if(norm.bias, bias, width)? })
    }

    /// A norm's weight.
    fn vector(&self, role: Role, len: usize, norm: &NormSpec) -> Result<Vector, LoadError> {
        match norm.weight {
            true => Ok(Vector { parts: vec![self.part(role, &[len])?], len, plus: norm.plus }),
            false => Ok(Vector { parts: Vec::new(), len, plus: 0.0 }),
        }
    }

    fn vector_if(&self, there: bool, role: Role, len: usize) -> Result<Option<Vector>, LoadError> {
        if !there { Ok(None) } else { Ok(Some(Vector { parts: vec![self.part(role, &[len])?], len, plus: 0.0 })) }
    }

    /// The tensor of a role; `shape` is that of the matrix, the file's may be the other way round.
    fn part(&self, role: Role, shape: &[usize]) -> Result<Part, LoadError> {
        let (name, view, _) = self.need(role, 0)?;
        let turned = self.stored().transposed.contains(&role) && shape.len() == 2;
        let there = if turned { vec![shape[1], shape[0]] } else { shape.to_vec() };
        self.fits(&name, view, &there)?;
        let part = Part::whole(role, name, view, &there)?;
        Ok(if turned { part.transposed() } else { part })
    }

    /// The `n`th of `of` tensors, or of one tensor that holds all of them.
    fn nth(&self, role: Role, n: usize, of: usize, shape: &[usize]) -> Result<Part, LoadError> {
        let (name, view, own) = self.need(role, n)?;
        let turned = self.stored().transposed.contains(&role) && shape.len() == 2;
        let there = if turned { vec![shape[1], shape[0]] } else { shape.to_vec() };
        let part = if own {
            self.fits(&name, view, &there)?;
            Part::whole(role, name, view, &there)?
        } else {
            self.fits(&name, view, &[&[of], &there[..]].concat())?;
            Part::of(role, name, view, n * there.iter().product::<usize>(), &there)?
        };
        Ok(if turned { part.transposed() } else { part })
    }

    fn fits(&self, name: &str, (_, found): Header<'_>, shape: &[usize]) -> Result<(), LoadError> {
        if found == shape {
            return Ok(());
        }
        Err(LoadError::Shape { tensor: name.to_owned(), expected: shape.to_vec(), found: found.to_vec() })
    }

    /// The first of the role's names that is there.
    fn look(&self, role: Role, n: usize) -> Option<(String, Header<'a>, bool)> {
        let names = self.files.arch().names(role, self.layer, n, self.files.naming());
        names.into_iter().find_map(|(name, own)| self.files.weights().header(&name).map(|view| (name, view, own)))
    }

    fn need(&self, role: Role, n: usize) -> Result<(String, Header<'a>, bool), LoadError> {
        if let Some(found) = self.look(role, n) {
            return Ok(found);
        }
        let usual = self.files.arch().names(role, self.layer, n, self.files.naming()).pop();
        let name = usual.map_or_else(|| format!("of layer {}", self.layer), |(name, _)| name);
        Err(LoadError::MissingTensor { name, role: role.to_string() })
    }

    /// How GGUF files of this family order the rows of q and k.
    fn turn(&self, heads: usize) -> RowOrder {
        match (self.files.naming(), self.files.arch().gguf) {
            (Naming::Gguf, Some(habits)) if habits.interleaved_qk => RowOrder::Interleaved { heads },
            _ => RowOrder::Natural,
        }
    }

    /// GGUF's converter undoes what safetensors have of their own.
    fn stored(&self) -> Stored {
        if self.files.naming() == Naming::Gguf { Stored::USUAL } else { self.files.arch().stored }
    }
}

/// Collects names.
struct Used(HashSet<String>);

/// Nothing is left of the tensors.
pub(super) struct Gone;

impl super::tensors::Kind for Gone {
    type Matrix = ();
    type Vector = ();
    type Expert = ();
}

impl Visit for Used {
    type To = Gone;

    fn matrix(&mut self, parts: &[Part]) -> Result<(), LoadError> {
        self.0.extend(parts.iter().map(|p| p.name.clone()));
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> Result<(), LoadError> {
        self.matrix(&vector.parts)
    }

    fn expert(&mut self, expert: &Gated<Listed>) -> Result<(), LoadError> {
        expert.visit(self).map(|_| ())
    }
}

const GATED: GatedRoles = GatedRoles {
    fused: [Role::GateUp, Role::GateUpBias],
    gate: [Role::Gate, Role::GateBias],
    up: [Role::Up, Role::UpBias],
    down: [Role::Down, Role::DownBias],
};

const EXPERT: GatedRoles = GatedRoles {
    fused: [Role::ExpertGateUp, Role::ExpertGateUpBias],
    gate: [Role::ExpertGate, Role::ExpertGateBias],
    up: [Role::ExpertUp, Role::ExpertUpBias],
    down: [Role::ExpertDown, Role::ExpertDownBias],
};

/// The shared expert has no biases.
const SHARED: GatedRoles = GatedRoles {
    fused: [Role::SharedGateUp; 2],
    gate: [Role::SharedGate; 2],
    up: [Role::SharedUp; 2],
    down: [Role::SharedDown; 2],
};
