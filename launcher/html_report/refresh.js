// Of a live run: reads the page again now and then, and says where it has not been written for long.
const page=document.documentElement,written=Number(page.dataset.written),age=Date.now()/1000-written;
if(page.dataset.live==="yes"){
  const late=document.getElementById("late");
  if(late&&age>Number(page.dataset.patience)){late.hidden=false}
  setTimeout(()=>{if(!document.hidden)location.reload()},20000);
  document.addEventListener("visibilitychange",()=>{if(!document.hidden)location.reload()});
}
