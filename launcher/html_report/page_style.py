"""How the page looks, in dark and in light, and its one script. Constants: nothing of a run goes into either."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1f2430;--faint:#5f6775;--line:#e3e6eb;--page:#f6f7f9;--card:#fff;--reward:#2563eb;
--two:#7c3aed;--sampled:#d97706;--greedy:#059669;--bad:#dc2626;--ok:#15803d;--warn:#b45309;--s2:#db2777;--s3:#0891b2;
--shadow:0 1px 2px rgba(20,24,36,.07)}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8ee;--faint:#9aa3b2;--line:#2c313c;--page:#12151b;--card:#1a1e26;
--reward:#6ea0ff;--two:#b79bff;--sampled:#f5ae4b;--greedy:#3fcf9b;--bad:#ff7373;--ok:#4fd07f;--warn:#f2b04d;
--s2:#ff7ab8;--s3:#4cc9e0;--shadow:none}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.35rem;margin:0;overflow-wrap:anywhere;line-height:1.25}
h2{font-size:1.02rem;margin:0 0 10px}
p{margin:.3em 0;overflow-wrap:anywhere}
a{color:var(--reward)}
.top{display:flex;flex-wrap:wrap;gap:10px;align-items:center}
.word{font-weight:700;font-size:.82rem;letter-spacing:.03em;padding:3px 10px;border-radius:99px;background:var(--faint);
color:var(--card);white-space:nowrap}
.word.good{background:var(--ok)}.word.bad{background:var(--bad)}.word.live{background:var(--reward)}
.faint,.none{color:var(--faint)}
.notice{border-left:4px solid var(--warn);background:var(--card);padding:8px 12px;border-radius:4px;margin:12px 0}
.notice.bad{border-color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:10px;margin:16px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;box-shadow:var(--shadow)}
.tile{padding:10px 13px}.tile b{display:block;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{display:block;font-size:.78rem;color:var(--faint);overflow-wrap:anywhere}
.tile b.bad{color:var(--bad)}.tile b.good{color:var(--ok)}
.card{padding:14px 16px;margin:14px 0}
svg{width:100%;height:auto;display:block;overflow:visible}
svg.narrow{display:none}
.grid{stroke:var(--line)}.axis{stroke:var(--faint);stroke-width:1}
.tick{fill:var(--faint);font-size:11.5px;font-variant-numeric:tabular-nums}.end{text-anchor:end}.mid{text-anchor:middle}
.line{fill:none;stroke:var(--reward);stroke-width:2.2;stroke-linejoin:round}
.band{fill:var(--reward);opacity:.17}.dot{fill:var(--reward);opacity:.33}
.line.two{stroke:var(--two);stroke-width:1.8}.band.two{fill:var(--two)}
.line.s0{stroke:var(--two)}.line.s1{stroke:var(--sampled)}.line.s2{stroke:var(--greedy)}.line.s3{stroke:var(--s2)}
.line.s4{stroke:var(--s3)}.line.s5{stroke:var(--bad)}
.line,.band,.dot{pointer-events:none}
path.pale{fill:none;stroke:var(--bad);stroke-width:1.3;opacity:.38;stroke-dasharray:3 3}
circle.pale{fill:var(--bad);opacity:.32}
.restore{stroke:var(--faint);stroke-width:1.3;stroke-dasharray:5 4}.border{stroke:var(--faint);stroke-dasharray:1 4}
.hit{stroke:transparent;stroke-width:9}
polygon.mended{fill:var(--warn)}polygon.open{fill:var(--bad)}
.stem{stroke-width:1;opacity:.28}.stem.mended{stroke:var(--warn)}.stem.open{stroke:var(--bad)}
.save{stroke:var(--faint);stroke-width:1.6}.save.bad{stroke:var(--bad)}
.eval{stroke-width:1.2;stroke-dasharray:1 4;fill:none;stroke:var(--sampled)}.eval.greedy{stroke:var(--greedy)}
polygon.eval{fill:var(--sampled);stroke:var(--card);stroke-dasharray:none}
polygon.eval.greedy{fill:var(--greedy);stroke:var(--card)}
.strips rect{fill:transparent}.strips rect:hover{fill:var(--faint);opacity:.16}
.bar.mended{fill:var(--warn)}.bar.open{fill:var(--bad)}
.state.running{fill:var(--ok);opacity:.6}.state.starting,.state.ending{fill:var(--faint);opacity:.5}
.state.paused{fill:var(--sampled)}.state.repairing{fill:var(--warn)}.state.restoring{fill:var(--two)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;padding:0;margin:8px 0 0;font-size:.8rem;
color:var(--faint)}
.legend li{display:flex;align-items:center;gap:6px}
.sign{width:14px;height:3px;border-radius:2px;background:var(--reward);flex:none;opacity:1}
.sign.two,.sign.s0{background:var(--two)}.sign.s1{background:var(--sampled)}.sign.s2{background:var(--greedy)}
.sign.s3{background:var(--s2)}.sign.s4{background:var(--s3)}.sign.s5{background:var(--bad)}
.sign.band{height:9px;opacity:.25}
.sign.dot{width:7px;height:7px;border-radius:50%;opacity:.5}
.sign.pale{background:var(--bad);opacity:.45}
.sign.eval{width:8px;height:8px;border-radius:0;transform:rotate(45deg);background:var(--sampled)}
.sign.greedy{background:var(--greedy)}
.sign.restore,.sign.border{background:none;width:0;height:13px;border-left:2px dashed var(--faint);border-radius:0}
.sign.border{border-left-style:dotted}
.sign.mended,.sign.open,.sign.state{width:11px;height:11px;border-radius:2px}
.sign.mended{background:var(--warn)}.sign.open{background:var(--bad)}
.sign.save{width:2px;height:10px;background:var(--faint)}
.sign.running{background:var(--ok);opacity:.6}.sign.starting,.sign.ending{background:var(--faint);opacity:.5}
.sign.paused{background:var(--sampled)}.sign.repairing{background:var(--warn)}.sign.restoring{background:var(--two)}
.wide-table{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--faint);font-weight:600;font-size:.78rem;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
td.words{min-width:230px;overflow-wrap:anywhere}
.good{color:var(--ok)}.bad{color:var(--bad)}
.word.good,.word.bad{color:var(--card)}
ul.plain{margin:.4em 0;padding-left:1.1em}
summary{cursor:pointer;color:var(--faint)}details{margin-top:10px}
.wide-table+.wide-table{margin-top:22px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 14px;font-size:.83rem;color:var(--faint);margin:8px 0}
dt{font-weight:600}dd{margin:0}
@media (max-width:700px){main{padding:14px 10px 40px}svg.wide{display:none}svg.narrow{display:block}
.card{padding:12px 10px}.tiles{grid-template-columns:repeat(2,1fr);gap:8px}
dl{grid-template-columns:1fr}dd{margin-bottom:5px}
table.rows thead{display:none}table.rows tr{display:block;padding:8px 0;border-bottom:1px solid var(--line)}
table.rows td{display:flex;justify-content:space-between;gap:14px;border:0;padding:2px 0;text-align:right;min-width:0}
table.rows td.words{display:block;text-align:left}
table.rows td[data-label]::before{content:attr(data-label);color:var(--faint);text-align:left}
table.rows td.words::before,table.rows td.head::before{display:none}
table.rows td.zero{display:none}table.rows td.head{font-size:.95rem}.tile b{font-size:1.12rem}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""

SCRIPT = """
const page=document.documentElement,written=Number(page.dataset.written),age=Date.now()/1000-written;
if(page.dataset.live==="yes"){
  const late=document.getElementById("late");
  if(late&&age>Number(page.dataset.patience)){late.hidden=false}
  setTimeout(()=>{if(!document.hidden)location.reload()},20000);
  document.addEventListener("visibilitychange",()=>{if(!document.hidden)location.reload()});
}
"""
"""Of a run that goes on: read the file again now and then, and say where it has not been written for long."""
